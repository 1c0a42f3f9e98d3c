import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * ConsumeByPop NAMESERVERS GROUP TOPIC DIGITS BROKER [FIRST SECOND]: makes topic and group, sets their mode to POP, and
 * is a push consumer that pops until stdin ends. It fails the first try of every key that ends in DIGITS, and two tries
 * of one that begins with "fence"; FIRST and SECOND are the seconds until the next try. A line per message that it
 * consumed, one per failure. The command "pull" on stdin sets the mode to PULL.
 */
public final class ConsumeByPop {
    public static void main(String[] args) throws Exception {
        setMode(args[0], args[1], args[2], args[4], MessageRequestMode.POP);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[1]);
        consumer.setNamesrvAddr(args[0]);
        consumer.setPollNameServerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(false);
        consumer.setPopInvisibleTime(10_000);
        consumer.subscribe(args[2], "*");
        Method getDelays = DefaultMQPushConsumerImpl.class.getDeclaredMethod("getPopDelayLevel");
        getDelays.setAccessible(true);
        int[] delays = (int[]) getDelays.invoke(consumer.getDefaultMQPushConsumerImpl());
        for (int i = 5; i < args.length; i++) {
            delays[i - 4] = Integer.parseInt(args[i]);
        }
        Map<String, Integer> tries = new ConcurrentHashMap<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                String key = message.getKeys();
                int failing = key.startsWith("fence") ? 2 : key.endsWith(args[3]) ? 1 : 0;
                if (tries.merge(key, 1, Integer::sum) <= failing) {
                    context.setDelayLevelWhenNextConsume(1 + message.getReconsumeTimes());
                    Lines.print("failed", key);
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                Lines.print("key", key, "reconsumeTimes", message.getReconsumeTimes(),
                    "pop", message.getProperty("1ST_POP_TIME") != null, "topic", message.getTopic());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Lines.print("started", true);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        while (commands.readLine() != null) {
            setMode(args[0], args[1], args[2], args[4], MessageRequestMode.PULL);
            Lines.print("did", "pull");
        }
        consumer.shutdown();
        Lines.print("done", true);
        System.exit(0);
    }

    static void setMode(String servers, String group, String topic, String broker, MessageRequestMode mode)
        throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(servers);
        admin.start();
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(topic, 4, 4));
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName(group);
        admin.createAndUpdateSubscriptionGroupConfig(broker, config);
        admin.setMessageRequestMode(broker, topic, group, mode, 0, 5000);
        admin.shutdown();
    }
}
